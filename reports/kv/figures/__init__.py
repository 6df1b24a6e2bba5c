"""Charts of the page for prefill/decode runs."""
