"""The Python API: `penstock.load` and the `Run` that it returns. See docs/guide/python.md."""
