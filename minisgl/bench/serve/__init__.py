"""Load on a server from outside: requests over HTTP, and what their answers, and the server's processes, show."""
