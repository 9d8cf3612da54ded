"""The part of API discovery that kubectl needs."""

from __future__ import annotations

from tests.kubernetes_fake.kinds import RESOURCES
from tests.kubernetes_fake.store import Json, Resource

VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


def document(path: str) -> Json | None:
    """The discovery document at this path, or None."""
    groups = sorted({(one.group, one.version) for one in RESOURCES if one.group})
    match path.strip("/").split("/"):
        case ["version"]:
            return {"major": "1", "minor": "31", "gitVersion": "v1.31.0-edl-fake", "platform": "none"}
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        case ["apis"]:
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(*one) for one in groups]}
        case ["apis", group]:
            return next((_group(*one) for one in groups if one[0] == group), None)
        case ["api", "v1"]:
            return _resources("", "v1")
        case ["apis", group, version] if (group, version) in groups:
            return _resources(group, version)
    return None


def _group(group: str, version: str) -> Json:
    one = {"groupVersion": f"{group}/{version}", "version": version}
    return {"kind": "APIGroup", "apiVersion": "v1", "name": group, "versions": [one], "preferredVersion": one}


def _resources(group: str, version: str) -> Json:
    entries: list[Json] = []
    for one in RESOURCES:
        if (one.group, one.version) == (group, version):
            entries += _entries(one)
    name = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": entries}


def _entries(one: Resource) -> list[Json]:
    main: Json = {
        "name": one.plural,
        "singularName": one.kind.lower(),
        "namespaced": one.namespaced,
        "kind": one.kind,
        "verbs": VERBS,
        "shortNames": list(one.short),
    }
    if not one.replicas:
        return [main]
    scale = {
        "name": f"{one.plural}/scale",
        "singularName": "",
        "namespaced": True,
        "group": "autoscaling",
        "version": "v1",
        "kind": "Scale",
        "verbs": ["get", "patch", "update"],
    }
    return [main, scale]
