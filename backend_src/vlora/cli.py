"""The command line: `vlora serve`, `vlora adapters`."""


def main() -> None:
    raise SystemExit("not yet")
