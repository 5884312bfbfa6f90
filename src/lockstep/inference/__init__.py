"""A trained model in use: loaded from its weights alone, evaluated, asked, exported, shown."""
