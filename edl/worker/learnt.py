"""Which modules to import ahead for a script: learnt from its workers' records. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

LIBRARY_FOLDERS = frozenset({"site-packages", "dist-packages"})
"""Names of the folders in which installers put packages."""
WORTH_S = 0.3
"""Least time of imports in seconds for which a template is made."""
EACH_ROUND = frozenset(
    {
        "EDL_ROUND",
        "MASTER_PORT",
        "PADDLE_CURRENT_ENDPOINT",
        "PADDLE_GLOO_HTTP_ENDPOINT",
        "PADDLE_LOG_DIR",
        "PADDLE_MASTER",
        "PADDLE_MASTER_ENDPOINT",
        "PADDLE_PORT",
        "PADDLE_PSERVERS_IP_PORT_LIST",
        "PADDLE_TRAINER_ENDPOINTS",
        "PADDLE_WORKER_ENDPOINT",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_RESTART_COUNT",
    }
)
"""Variables that differ from round to round: a module that reads one when it is imported cannot be imported ahead."""

UNKNOWN = "as no worker has"
"""End of the reason to leave a module out that imports one which is not known."""
ALSO_LEFT_OUT = "which is left out"
"""End of the reason to leave a module out that imports one which is left out."""


@dataclass(frozen=True, slots=True)
class ModuleFile:
    """A module and the file that it was loaded from (empty for a package without one)."""

    name: str
    origin: str


@dataclass(frozen=True, slots=True)
class SeenImport:
    """One line of a record."""

    at_ms: int
    """When the import began."""
    nested: bool
    """Whether another recorded import was still going on."""
    module: ModuleFile


@dataclass(frozen=True, slots=True)
class LearntModules:
    """What is known about a script's imports."""

    modules: tuple[ModuleFile, ...] = ()
    """In the order of their imports."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Modules not to import ahead, with their submodules, and the reasons."""
    set_before: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the script, or a module, sets before it imports this module."""
    rehearsed: bool = False
    """Whether all other modules have been imported in a process that watches what they do."""
    reads: tuple[str, ...] = ()
    """Environment variables that the modules read when they are imported."""
    environment_as_given: bool = False
    """Whether, the last time, the launcher's environment had the same values of ``reads`` as the workers'."""

    @property
    def wanted(self) -> tuple[ModuleFile, ...]:
        """The modules to import ahead."""
        return tuple(one for one in self.modules if not covers(self.left_out, one.name))

    @property
    def barred_from(self) -> dict[str, str]:
        """For each variable that a worker sets itself, the module from which on the wanted ones must not read it."""
        names, wanted = [one.name for one in self.modules], {one.name for one in self.wanted}
        found: dict[str, str] = {}
        for variable, first in self.set_before.items():
            later = (name for name in names[names.index(first) :] if name in wanted) if first in names else iter(())
            module = next(later, "")
            if module:
                found[variable] = module
        return found


def covers(names: Collection[str], module: str) -> bool:
    """Whether a module or one of the packages around it is among the names."""
    parts = module.split(".")
    return any(".".join(parts[:length]) in names for length in range(1, len(parts) + 1))


def parse_record(text: str) -> tuple[SeenImport, ...]:
    """The lines of a worker's record; what is not one is skipped."""
    found = []
    for line in text.splitlines():
        at_ms, _, rest = line.partition("\t")
        nested, _, rest = rest.partition("\t")
        name, tab, origin = rest.partition("\t")
        if tab and name and at_ms.isdecimal() and nested in ("0", "1"):
            found.append(SeenImport(int(at_ms), nested == "1", ModuleFile(name, origin)))
    return tuple(found)


def variables_set(text: str, modules: Collection[str]) -> dict[str, str]:
    """The environment variables that a worker has changed between its imports, each with the first of these modules
    that it imported afterwards."""
    found, waiting = dict[str, str](), list[str]()
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) == 4 and fields[1] == "2":
            waiting.append(fields[2])
        elif len(fields) == 4 and fields[2] in modules:
            for variable in waiting:
                found.setdefault(variable, fields[2])
            waiting.clear()
    return found


def cost_s(record: Iterable[SeenImport]) -> float:
    """Least time that the imports took, in seconds: from the beginning of each outermost one to that of the last import
    inside it."""
    total_ms = began_ms = last_ms = 0
    for one in record:
        if not one.nested:
            total_ms += last_ms - began_ms
            began_ms = one.at_ms
        last_ms = one.at_ms
    return (total_ms + last_ms - began_ms) / 1000


def is_library(module: ModuleFile, standard: Collection[str], script_folder: str, own_package: str = "") -> bool:
    """Whether a module was installed, as opposed to being the user's own, which may change while the job runs.

    ``standard``: folders of the standard library. ``script_folder``: that of the script, whose modules are the user's
    wherever it is. ``own_package``: the top-level package of a script started with ``-m``.
    """
    root = search_folder(module)
    if not root or root == script_folder or module.name.partition(".")[0] in ("edl", "__main__", own_package):
        return False
    return root in standard or root.rpartition("/")[2] in LIBRARY_FOLDERS


def search_folder(module: ModuleFile) -> str:
    """The entry of the search path below which a module was found; empty if its file has another place or none."""
    parts = module.name.split(".")
    folder, _, file = module.origin.rpartition("/")
    if file.partition(".")[0] == "__init__":
        tail = parts
    elif file.partition(".")[0] == parts[-1]:
        tail = parts[:-1]
    else:
        return ""
    end = "".join(f"/{part}" for part in tail)
    return folder[: len(folder) - len(end)] if folder.endswith(end) else ""


def own_reasons(left_out: Mapping[str, str]) -> dict[str, str]:
    """The modules that are left out for what they do themselves. Reasons that lie in what was known are gone with it: a
    worker may have been seen in the middle of an import that takes long."""
    return {module: why for module, why in left_out.items() if not why.endswith((UNKNOWN, ALSO_LEFT_OUT))}


def merged(known: tuple[ModuleFile, ...], seen: Iterable[ModuleFile]) -> tuple[ModuleFile, ...]:
    """The known modules, then those that are new. A module found in another file replaces its earlier entry."""
    result = {one.name: one for one in known}
    result.update((one.name, one) for one in seen)
    return tuple(result.values())


def same_values(names: Iterable[str], one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether two environments agree on these variables."""
    return all(one.get(name) == other.get(name) for name in names)
