"""Tools for `vlora adapters generate`: data for it, and comparisons of its runs."""
