"""A Serve config file: read it, and find the keys that Serve would drop without a word."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from deployments.config.errors import ConfigError, nearest

BUILDER = "deployments.app:build"


def read(path: Path) -> dict[str, Any]:
    """The file's mapping, or ConfigError saying what stands in the way (with line and column)."""
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark is not None else str(path)
        raise ConfigError([f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}"]) from None
    if not isinstance(content, dict):
        raise ConfigError(
            [f"{path}: a Serve config is a mapping with `applications`, this is a {type(content).__name__}"]
        )
    return content


def chain_applications(content: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The applications that our builder builds, with their place in the file."""
    applications = content.get("applications")
    for index, application in enumerate(applications if isinstance(applications, list) else []):
        if isinstance(application, Mapping) and application.get("import_path") == BUILDER:
            yield index, application


def levels() -> dict[str, type[BaseModel]]:
    """Serve's schema of each level of the file."""
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import (
        DeploymentSchema,
        HTTPOptionsSchema,
        LoggingConfig,
        RayActorOptionsSchema,
        ServeApplicationSchema,
        ServeDeploySchema,
        gRPCOptionsSchema,
    )

    return {
        "top level": ServeDeploySchema,
        "http_options": HTTPOptionsSchema,
        "grpc_options": gRPCOptionsSchema,
        "logging_config": LoggingConfig,
        "application": ServeApplicationSchema,
        "deployment": DeploymentSchema,
        "autoscaling_config": AutoscalingConfig,
        "ray_actor_options": RayActorOptionsSchema,
    }


def own_keys() -> dict[str, set[str]]:
    """Keys of our own sections, to say where a misplaced one belongs."""
    from deployments.config.models import AppConfig, Chain, DraftSpec, Evidence, Limits, Semantic, Target

    return {
        "args": set(AppConfig.model_fields),
        "args.target": set(Target.model_fields),
        "args.drafts[]": set(DraftSpec.model_fields),
        "args.chain": set(Chain.model_fields),
        "args.chain.semantic": set(Semantic.model_fields),
        "args.evidence": set(Evidence.model_fields),
        "args.limits": set(Limits.model_fields),
    }


def lint(content: Mapping[str, Any]) -> list[str]:
    """Every key of the Serve levels that Serve does not know, with the nearest right one or the right place."""
    problems = _unknown(content, "top level", "")
    for section in ("http_options", "grpc_options", "logging_config"):
        problems += _section(content, section, "")
    applications = content.get("applications")
    if not isinstance(applications, list) or not applications:
        return [*problems, "applications: a list with at least one application is required"]
    for index, application in enumerate(applications):
        where = f"applications[{index}]"
        if not isinstance(application, Mapping):
            problems.append(f"{where}: must be a mapping")
            continue
        problems += _unknown(application, "application", where)
        problems += _section(application, "logging_config", where)
        problems += _working_dir(application, where)
        deployments = application.get("deployments")
        for number, deployment in enumerate(deployments if isinstance(deployments, list) else []):
            place = f"{where}.deployments[{number}]"
            if not isinstance(deployment, Mapping):
                problems.append(f"{place}: must be a mapping")
                continue
            problems += _unknown(deployment, "deployment", place)
            for section in ("autoscaling_config", "ray_actor_options", "logging_config"):
                problems += _section(deployment, section, place)
    return problems or _schema(content)


def unknown_overrides(application: Mapping[str, Any], known: list[str], where: str) -> list[str]:
    """Overrides of deployments that the application does not have."""
    problems = []
    deployments = application.get("deployments")
    for number, deployment in enumerate(deployments if isinstance(deployments, list) else []):
        name = deployment.get("name") if isinstance(deployment, Mapping) else None
        if name is not None and name not in known:
            problems.append(
                f"{where}.deployments[{number}].name: no deployment {name!r}; this application has {', '.join(known)}"
            )
    return problems


def _section(holder: Mapping[str, Any], section: str, where: str) -> list[str]:
    value = holder.get(section)
    place = f"{where}.{section}" if where else section
    return _unknown(value, section, place) if isinstance(value, Mapping) else []


def _unknown(value: Mapping[str, Any], level: str, where: str) -> list[str]:
    schemas = levels()
    problems = []
    for key in value:
        if key in schemas[level].model_fields:
            continue
        path = f"{where}.{key}" if where else str(key)
        problems.append(f"{path}: Serve ignores this key here{_where_it_belongs(str(key), level, schemas)}")
    return problems


def _where_it_belongs(key: str, level: str, schemas: Mapping[str, type[BaseModel]]) -> str:
    places = [
        f"the {name}" if name == "top level" else name for name, schema in schemas.items() if key in schema.model_fields
    ]
    places += [name for name, keys in own_keys().items() if key in keys]
    if places:
        return f"; it belongs in {' or '.join(places)}"
    hint = nearest(key, schemas[level].model_fields) if level else ""
    if "mean" in hint:
        return hint
    names = {name for schema in schemas.values() for name in schema.model_fields}
    hint = nearest(key, names | {name for keys in own_keys().values() for name in keys})
    if "mean" in hint:
        right = hint.split("'")[1]
        return hint.rstrip("?") + _where_it_belongs(right, "", {"": BaseModel, **schemas}).replace("; it", "? That")
    return f" (known in {level}: {', '.join(sorted(schemas[level].model_fields))})"


def _working_dir(application: Mapping[str, Any], where: str) -> list[str]:
    runtime_env = application.get("runtime_env")
    value = runtime_env.get("working_dir") if isinstance(runtime_env, Mapping) else None
    if isinstance(value, str) and "://" not in value:
        return [
            f"{where}.runtime_env.working_dir: {value!r} is a local folder, which Serve cannot upload from a config file; "
            "put this repository on every node's PYTHONPATH and leave working_dir out, or give the URI of a zip of it "
            "(https://, s3://, gs:// or file://)"
        ]
    return []


def _schema(content: Mapping[str, Any]) -> list[str]:
    """What Serve itself would refuse."""
    from ray.serve.schema import ServeDeploySchema

    try:
        ServeDeploySchema.model_validate(dict(content))
    except ValidationError as error:
        return [f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()]
    except ValueError as error:
        return [str(error)]
    return []
