"""Strict reading of JSON documents: classes and types of fields, errors that name a field."""
