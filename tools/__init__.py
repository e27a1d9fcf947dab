"""Development tools. This file makes the folder a package, so that no other `tools` is imported."""
