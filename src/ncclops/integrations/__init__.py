"""Callbacks for trainers that have a loop of their own: receipts, phases, a stop at one step.

===============================  ==================================================================
``integrations.hugging_face``    ``transformers.Trainer(callbacks=[ReceiptCallback()])``
``integrations.lightning``       ``lightning.Trainer(callbacks=[ReceiptCallback()])``
===============================  ==================================================================

Each module imports its framework; this package imports none. Outside ``ncclops launch`` the
callbacks do nothing.
"""
