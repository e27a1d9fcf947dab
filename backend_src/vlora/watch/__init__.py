"""`vlora watch`: cameras whose answers become alerts."""
