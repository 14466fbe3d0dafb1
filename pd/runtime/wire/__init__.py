"""Messages between processes and the sockets that carry them."""
