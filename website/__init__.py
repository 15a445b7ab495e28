"""What the documentation site needs beside its pages: formulas, docstrings, and pages generated from the catalog."""
