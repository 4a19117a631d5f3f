"""Which tests fail when a setting is ignored: a table for every section of the configuration."""
