// Stands in for NCCL where there is none: it has all names and does nothing. How it differs from a real one is chosen when
// it is compiled:
//   -DVERSION=21800   what it says is its version
//   -DMUTE            asked for its version it fails
//   -DLACKS_ABORT     it has no ncclCommAbort

int ncclGetVersion(int *version) {
  *version = VERSION;
#ifdef MUTE
  return 3;
#else
  return 0;
#endif
}

#define NOTHING(name) \
  int name(void) { return 3; }

NOTHING(ncclGetUniqueId)
NOTHING(ncclGetErrorString)
NOTHING(ncclGetLastError)
NOTHING(ncclCommInitRankConfig)
NOTHING(ncclCommGetAsyncError)
NOTHING(ncclCommSplit)
NOTHING(ncclCommFinalize)
NOTHING(ncclCommDestroy)
#ifndef LACKS_ABORT
NOTHING(ncclCommAbort)
#endif
NOTHING(ncclCommCount)
NOTHING(ncclCommCuDevice)
NOTHING(ncclCommUserRank)
NOTHING(ncclRedOpCreatePreMulSum)
NOTHING(ncclRedOpDestroy)
NOTHING(ncclAllReduce)
NOTHING(ncclAllGather)
NOTHING(ncclBroadcast)
NOTHING(ncclReduce)
NOTHING(ncclReduceScatter)
NOTHING(ncclSend)
NOTHING(ncclRecv)
NOTHING(ncclGroupStart)
NOTHING(ncclGroupEnd)
