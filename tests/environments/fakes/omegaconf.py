import types


class OmegaConf:
    @staticmethod
    def create(values):
        return types.SimpleNamespace(**values)
