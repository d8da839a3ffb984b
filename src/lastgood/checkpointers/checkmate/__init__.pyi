from lastgood.checkpointers.checkmate.options import CheckmateOptions as CheckmateOptions
from lastgood.checkpointers.checkmate.system import Checkmate as Checkmate
from lastgood.gradients.tap.ddp_hook import checkmate_hook as checkmate_hook
from lastgood.gradients.tap.ring_hook import RingReducer as RingReducer
from lastgood.gradients.tap.ring_hook import ring_all_reduce as ring_all_reduce
from lastgood.wire.ring_comm import RingComm as RingComm
from lastgood.wire.ring_link import listen_ring as listen_ring
