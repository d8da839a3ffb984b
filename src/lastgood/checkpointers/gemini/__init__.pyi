from lastgood.checkpointers.gemini.ddp_hook import marked_all_reduce as marked_all_reduce
from lastgood.checkpointers.gemini.system import Gemini as Gemini
from lastgood.checkpointers.gemini.system import GeminiOptions as GeminiOptions
