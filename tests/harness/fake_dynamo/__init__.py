"""Stands in for Dynamo in tests of what surrounds it; see `dynamo/frontend.py`."""
