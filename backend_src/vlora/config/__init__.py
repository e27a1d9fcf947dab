"""Options of the server, read once from `lmm/1/model.json`."""

from vlora.config.options import (
    ADAPTERS_VARIABLE,
    AUTO,
    DTYPES,
    MERGING,
    MODEL_VARIABLE,
    POLICIES,
    QUANTIZATIONS,
    IntOrAuto,
    Limits,
    Options,
)
from vlora.config.parsing import (
    check_policy,
    load_adapter_names,
    load_options,
    load_replacing,
    parse_options,
    read_keys,
    replace_keys,
    resolve_folders,
)

__all__ = [
    "ADAPTERS_VARIABLE",
    "AUTO",
    "DTYPES",
    "MERGING",
    "MODEL_VARIABLE",
    "POLICIES",
    "QUANTIZATIONS",
    "IntOrAuto",
    "Limits",
    "Options",
    "check_policy",
    "load_adapter_names",
    "load_options",
    "load_replacing",
    "parse_options",
    "read_keys",
    "replace_keys",
    "resolve_folders",
]
