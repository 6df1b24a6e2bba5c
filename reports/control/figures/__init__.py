"""Charts of the control plane's page."""
