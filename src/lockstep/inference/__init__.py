"""Uses a trained model: loads it from its weights alone, evaluates it, predicts with it, exports it, shows a demo."""
