"""Results of conformance runs side by side: rules by subjects, with the evidence of each verdict."""
