"""pytest's way in. The command line and the collection are in tests/plugin.py."""

pytest_plugins = ["tests.plugin"]
