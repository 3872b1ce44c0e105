"""The coordinator's services, as thin as they can be: message in, decision, message out."""
