"""Uses a trained model: loads it from its weights alone, and predicts with it."""
