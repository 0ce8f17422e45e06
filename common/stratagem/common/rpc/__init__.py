"""Holds what every gRPC client and server of this project has in common."""
