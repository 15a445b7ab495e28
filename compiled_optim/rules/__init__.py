"""The optimizers: one a file, each a docstring, a constructor, its checks and the formula."""
