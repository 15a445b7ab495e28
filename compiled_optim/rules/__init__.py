"""The optimizers. Each file has a docstring, a constructor, range checks and the formula."""
