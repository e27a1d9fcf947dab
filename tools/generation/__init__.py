"""Tools for `vlora adapters generate`: data for it, and a check of served accuracies."""
