"""The strict configuration of an application: what may stand in the ``args`` of its Serve config, and checks on it."""

from deployments.config.errors import ConfigError
from deployments.config.load import load_args
from deployments.config.models import AppConfig, Chain, DraftSpec, Limits, Pool, Target

__all__ = ["AppConfig", "Chain", "ConfigError", "DraftSpec", "Limits", "Pool", "Target", "load_args"]
