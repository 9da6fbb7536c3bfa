"""What TorchRec's users bring: its objects, idioms and tests, with only the import of the wrapper changed."""
