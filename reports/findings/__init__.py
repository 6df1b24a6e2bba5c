"""Which rules a system keeps: from the run folders of black-box cases to a page and a document."""
