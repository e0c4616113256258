"""Every user setting, validated: read from YAML, all errors reported in one pass, written back."""

from megatrain.config.load import dump_config, load_config
from megatrain.config.settings import Config

__all__ = ["Config", "dump_config", "load_config"]
