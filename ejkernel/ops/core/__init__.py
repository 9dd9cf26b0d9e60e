"""The machinery between an operation's signature and a kernel."""
