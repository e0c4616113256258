"""Every user setting, validated: read from YAML, refused with all faults at once, written back."""

from megatrain.config.load import dump_config, load_config
from megatrain.config.settings import Config

__all__ = ["Config", "dump_config", "load_config"]
