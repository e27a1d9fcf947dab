"""The tests. With this file, `import tests` finds this folder before an installed `tests`."""
