"""Python scripts that create a trainer, read from their syntax trees and never imported or run."""
