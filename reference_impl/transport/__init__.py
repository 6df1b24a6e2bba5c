"""How engines reach each other: notifications, reads of KV, and the handshake that makes both possible."""
