"""Chats: from records with messages to tokens and the labels that say which of them are trained."""
