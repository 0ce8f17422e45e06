"""This package holds the parts that every gRPC client and server of this project has in common."""
