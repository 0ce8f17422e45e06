"""Strict reading of JSON documents: forms, field rules, sections, errors that name a field."""
