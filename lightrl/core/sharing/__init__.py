"""Schedule devices shared by engines and trainer, or by engines of several sizes. Pure."""
