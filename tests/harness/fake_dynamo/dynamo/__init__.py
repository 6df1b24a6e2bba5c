"""The package that a deployment starts modules of, when this folder is on PYTHONPATH in Dynamo's place."""
