"""Development tools. The file makes this folder a package, so that `tools` is not another one."""
