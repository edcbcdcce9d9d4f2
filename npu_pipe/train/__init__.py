"""A job from its file to a trained model: config, model, data, optimizer, checkpoints, loop."""
