"""The router: registration with epochs, round robin, and errors that the client can see."""
