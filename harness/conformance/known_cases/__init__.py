"""What connectors are known to do wrong on the cases of this package, one file a subject and its versions."""
