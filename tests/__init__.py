"""The tests. The file makes this folder a package, so that `tests` is not another one."""
