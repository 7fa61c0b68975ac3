"""Files and overrides -> a checked `JobConfig` that still knows the origin of each value.

Order of reading:
1. Every override is parsed.
2. Files are merged from left to right.
3. Overrides are applied from left to right.
4. `options` are applied: the values of the command's own flags.
5. RLinf's keys become Tidegate's keys, and paths become absolute.
6. `tidegate.config.job_config` checks the result.

Invariant: a fault names the file and line, or the override, of its value. [test_layers: a_fault_names_the_file]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, get_origin

import yaml

from tidegate.config.base import ITEM, FileName, KeyPath, fields_of
from tidegate.config.job_config import ConfigError, JobConfig, parse_config
from tidegate.config.reading.layers import (
    EMPTY_LAYER,
    Layer,
    Origin,
    apply_override,
    dotted,
    is_override,
    merge_layers,
    parse_override,
    with_absolute_paths,
)
from tidegate.config.reading.yaml_text import AmbiguousYaml, Document, read_yaml, yaml_problem
from tidegate.config.sections.data import with_function_folders
from tidegate.rlinf.reading import read_rlinf

_FIELDS = tuple(fields_of(JobConfig))
_WHOLE = frozenset(path for path, found in _FIELDS if get_origin(found.annotation) is dict)
_KEYS = frozenset(path[: path.index(ITEM)] if ITEM in path else path for path, _ in _FIELDS)
_FILE_NAMES = {path: mark for path, found in _FIELDS for mark in found.metadata if isinstance(mark, FileName)}


@dataclass(frozen=True, slots=True)
class Sources:
    """The parts of a config. A later field takes precedence over an earlier one."""

    files: Sequence[Path]
    overrides: Sequence[str] = ()
    """`key=value` words. Relative paths in them count from `folder`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Top-level keys with the values of the command's flags."""
    folder: Path = Path()


@dataclass(frozen=True, slots=True)
class SourcedConfig:
    """A config, and the values in its sources with their origins."""

    config: JobConfig
    layer: Layer
    notes: tuple[str, ...] = ()
    """One line for each value whose meaning here differs from its text, for the person who starts the job."""


def sources_of(words: Sequence[str], options: Mapping[str, Any] | None = None) -> Sources:
    """Split the words of a command line: files and `key=value` in any order. ConfigError: no word is a file."""
    files = [Path(word) for word in words if not is_override(word)]
    if not files:
        raise ConfigError(f"{' '.join(words)}: no config to override; name a YAML file before key=value")
    return Sources(files, [word for word in words if is_override(word)], options or {})


def load_config(path: Path) -> JobConfig:
    """Load one file. ConfigError as `load_sources`."""
    return load_sources(Sources([path])).config


def load_sources(sources: Sources) -> SourcedConfig:
    """ConfigError: a file or an override cannot be read, or `parse_config` refuses the result."""
    try:
        reading = read_rlinf(_layered(sources), _KEYS)
        layer = _with_paths(reading.layer, sources.folder)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return SourcedConfig(parse_config(layer.values, layer=layer), layer, reading.notes)


def _layered(sources: Sources) -> Layer:
    overrides = [parse_override(text) for text in sources.overrides]
    files = [_file_layer(path, number) for number, path in enumerate(sources.files)]
    merged = reduce(lambda below, above: merge_layers(below, above, whole=_WHOLE), files, EMPTY_LAYER)
    for number, override in enumerate(overrides, start=len(files)):
        # The origin leaves the value out: it may be a URL with a password. The fault itself shows a value where it may.
        origin = Origin(f"override {dotted(override.path)}", sources.folder, number)
        merged = apply_override(merged, override, origin, whole=_WHOLE)
    top = len(files) + len(overrides)
    flags: dict[KeyPath, Origin] = {
        (key,): Origin(f"--{key.replace('_', '-')}", sources.folder, top) for key in sources.options
    }
    return merge_layers(merged, Layer(dict(sources.options), flags), whole=_WHOLE)


def _with_paths(layer: Layer, default: Path) -> Layer:
    """Make every path absolute."""

    def folder_of(path: KeyPath) -> Path:
        origin = layer.origin(path)
        return (origin.folder if origin else default).absolute()

    absolute = with_absolute_paths(layer, _FILE_NAMES)
    return replace(absolute, values=with_function_folders(absolute.values, folder_of))


def _file_layer(path: Path, number: int) -> Layer:
    document = _read(path)
    if document.value is None:
        raise ConfigError(f"config {path} is empty: write the keys of a job, such as those of examples/grpo.yaml")
    if not isinstance(document.value, dict):
        raise ConfigError(f"config {path} must hold keys and values such as job:, found {document.value!r}")
    origins = {at: Origin(f"{path}:{line}", path.parent, number) for at, line in document.lines.items()}
    return Layer(document.value, origins)


def _read(path: Path) -> Document:
    try:
        return read_yaml(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"config {path}: {error.strerror}; give the path of a YAML file, then key=value for each value to override"
        ) from error
    except AmbiguousYaml as error:
        raise ConfigError(f"config {path}: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} is not YAML: {yaml_problem(error)}; correct it there") from error
