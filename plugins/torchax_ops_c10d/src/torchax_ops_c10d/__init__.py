"""The op pack of torch's functional collectives. Found through pack.py; `map_group` says which mesh axis a group is."""

from torchax_ops_c10d.groups import CollectiveError, map_group

__all__ = ["CollectiveError", "map_group"]
