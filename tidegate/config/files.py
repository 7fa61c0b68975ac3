"""Files and overrides -> a checked `JobConfig` that still knows where each value was given.

Order: every override is read, then every file from left to right, then the overrides from left to right, then
`options`, which the command's own flags stand for; then keys of RLinf's become ours and paths absolute, then comes all
that `tidegate.config.job_config` checks.
Invariant: a fault names the file and line, or the override, that the value comes from.
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
    NOTHING,
    Layer,
    Origin,
    dotted,
    is_override,
    laid_over,
    overridden,
    parse_override,
    with_whole_paths,
)
from tidegate.config.reading.yaml_text import Document, NotAsMeant, read_yaml, yaml_problem
from tidegate.config.sections.data import with_function_folders
from tidegate.rlinf.reading import read_rlinf

_FIELDS = tuple(fields_of(JobConfig))
_WHOLE = frozenset(path for path, found in _FIELDS if get_origin(found.annotation) is dict)
_KEYS = frozenset(path[: path.index(ITEM)] if ITEM in path else path for path, _ in _FIELDS)
_FILE_NAMES = {path: mark for path, found in _FIELDS for mark in found.metadata if isinstance(mark, FileName)}


@dataclass(frozen=True, slots=True)
class Sources:
    """What a config is made of, the lowest first."""

    files: Sequence[Path]
    overrides: Sequence[str] = ()
    """`key=value`; relative paths in them count from `folder`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Top-level keys that flags of the command give."""
    folder: Path = Path()


@dataclass(frozen=True, slots=True)
class SourcedConfig:
    """A config, and the values that it was given with their origins."""

    config: JobConfig
    given: Layer
    notes: tuple[str, ...] = ()
    """On what was read otherwise than it was written, for whoever starts the job."""


def sources_of(words: Sequence[str], options: Mapping[str, Any] | None = None) -> Sources:
    """Of the words of a command line, files and `key=value` in any order. ConfigError where no file is among them."""
    files = [Path(word) for word in words if not is_override(word)]
    if not files:
        raise ConfigError(f"{' '.join(words)}: no config to override; name a YAML file before key=value")
    return Sources(files, [word for word in words if is_override(word)], options or {})


def load_config(path: Path) -> JobConfig:
    """Of one file. ConfigError as `load_sources`."""
    return load_sources(Sources([path])).config


def load_sources(sources: Sources) -> SourcedConfig:
    """ConfigError of a file, of an override, or as `parse_config`."""
    try:
        reading = read_rlinf(_layered(sources), _KEYS)
        given = _with_paths(reading.layer, sources.folder)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return SourcedConfig(parse_config(given.values, given=given), given, reading.notes)


def _layered(sources: Sources) -> Layer:
    overrides = [parse_override(text) for text in sources.overrides]
    files = [_file_layer(path, number) for number, path in enumerate(sources.files)]
    given = reduce(lambda below, above: laid_over(below, above, whole=_WHOLE), files, NOTHING)
    for number, override in enumerate(overrides, start=len(files)):
        # Without the value, which a fault tells where it may be told: it may be a URL with a password.
        origin = Origin(f"override {dotted(override.path)}", sources.folder, number)
        given = overridden(given, override, origin, whole=_WHOLE)
    top = len(files) + len(overrides)
    flags: dict[KeyPath, Origin] = {
        (key,): Origin(f"--{key.replace('_', '-')}", sources.folder, top) for key in sources.options
    }
    return laid_over(given, Layer(dict(sources.options), flags), whole=_WHOLE)


def _with_paths(given: Layer, default: Path) -> Layer:
    """Every path absolute."""

    def folder_of(path: KeyPath) -> Path:
        origin = given.origin(path)
        return (origin.folder if origin else default).absolute()

    whole = with_whole_paths(given, _FILE_NAMES)
    return replace(whole, values=with_function_folders(whole.values, folder_of))


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
            f"config {path}: {error.strerror}; give the path of a YAML file, and after it key=value where some differ"
        ) from error
    except NotAsMeant as error:
        raise ConfigError(f"config {path}: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} is not YAML: {yaml_problem(error)}; mend it there") from error
