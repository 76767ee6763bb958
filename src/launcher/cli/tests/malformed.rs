//! Rejected command lines and variables, with exit code and message. As in torchrun, exit code 2 stands for
//! text that cannot be parsed, and 1 for values that make no sense.

use super::{config_of_line, here};

#[rustfmt::skip]
const MALFORMED: &[(&str, &str, u8, &str)] = &[
    ("", "", 2, "no SCRIPT; write convoke [FLAGS] SCRIPT [ARGUMENTS]"),
    ("--nnodes=2", "", 2, "no SCRIPT; write convoke [FLAGS] SCRIPT [ARGUMENTS]"),
    ("--no-such-flag x.py", "", 2, "unknown flag --no-such-flag; see --help (flags of the script go behind SCRIPT)"),
    ("--master_address=10.0.0.1 x.py", "", 2, "unknown flag --master_address; did you mean --master-addr?"),
    ("--nproc-per_node=2 x.py", "", 2, "unknown flag --nproc-per_node; write --nproc-per-node (or --nproc_per_node)"),
    ("--nproc-pernode=2 x.py", "", 2, "unknown flag --nproc-pernode; did you mean --nproc-per-node?"),
    ("--nprocs-per-node 2 x.py", "", 2, "unknown flag --nprocs-per-node; did you mean --nproc-per-node?"),
    ("--nproc=2 x.py", "", 2, "--nproc is ambiguous between --nproc-per-node and --nproc_per_node; write --nproc-per-node"),
    ("--max=1 x.py", "", 2, "--max is ambiguous between --max-restarts and --max_restarts; write --max-restarts"),
    ("--rdzv x.py", "", 2, "--rdzv is ambiguous; write one of --rdzv-backend, --rdzv-endpoint, --rdzv-id, --rdzv-conf"),
    ("--no x.py", "", 2, "--no is ambiguous; write one of --node-rank, --no-python"),
    ("--log=x x.py", "", 2, "--log is ambiguous; write one of --log-dir, --log-line-prefix-template, --logs-specs"),
    ("-n 4 x.py", "", 2, "unknown flag -n; convoke calls it --nproc-per-node"),
    ("-np 4 x.py", "", 2, "unknown flag -np; convoke calls it --nproc-per-node"),
    ("-N 2 x.py", "", 2, "unknown flag -N; convoke calls it --nnodes"),
    ("-x x.py", "", 2, "unknown flag -x; see --help (flags of the script go behind SCRIPT)"),
    ("--num_processes=4 x.py", "", 2, "unknown flag --num_processes; convoke calls it --nproc-per-node"),
    ("--main_process_port=1 x.py", "", 2, "unknown flag --main_process_port; convoke calls it --master-port"),
    ("--standalone=1 x.py", "", 2, "--standalone takes no value, but got `1`; write --standalone"),
    ("-m=x mod", "", 2, "--module takes no value, but got `x`; write --module"),
    ("-mx mod", "", 2, "-mx: `x` is no short flag"),
    ("--nnodes", "", 2, "--nnodes needs a value; write --nnodes=N|MIN:MAX"),
    ("--rdzv-id train.py", "", 2, "no SCRIPT: `train.py` was taken as the value of --rdzv-id; write --rdzv-id=VALUE train.py"),
    ("--rdzv-id -x train.py", "", 2, "--rdzv-id needs a value, but `-x` looks like a flag; write --rdzv-id=-x if it is meant as the value"),
    ("--rdzv-id --standalone train.py", "", 2, "--rdzv-id needs a value, but `--standalone` looks like a flag; write --rdzv-id=--standalone if it is meant as the value"),
    ("-r", "", 2, "--redirects needs a value; write --redirects=STREAMS"),
    ("-t x.py", "", 2, "no SCRIPT: `x.py` was taken as the value of --tee; write --tee=VALUE x.py"),
    ("--max-restarts=x x.py", "", 2, "--max-restarts=x: not an integer; write --max-restarts=3"),
    ("--max-restarts= x.py", "", 2, "--max-restarts=: not an integer; write --max-restarts=3"),
    ("--max-restarts=1.5 x.py", "", 2, "--max-restarts=1.5: not an integer; write --max-restarts=3"),
    ("--max-restarts=-1 x.py", "", 1, "--max-restarts=-1: must not be negative; write --max-restarts=3"),
    ("--max-restarts=99999999999 x.py", "", 1, "--max-restarts=99999999999: too large; write --max-restarts=3"),
    ("--monitor-interval=fast x.py", "", 2, "--monitor-interval=fast: not a number; write --monitor-interval=0.1"),
    ("--monitor-interval=-1 x.py", "", 1, "--monitor-interval=-1: must be from 0 to 86400 seconds; write --monitor-interval=0.1"),
    ("--monitor-interval=nan x.py", "", 1, "--monitor-interval=nan: must be from 0 to 86400 seconds; write --monitor-interval=0.1"),
    ("--node-rank=one x.py", "", 2, "--node-rank=one: not an integer; write --node-rank=0"),
    ("--master-port=http x.py", "", 2, "--master-port=http: not an integer; write --master-port=29500"),
    ("--master-port=70000 x.py", "", 1, "--master-port=70000: a port is a number from 1 to 65535; write --master-port=29500"),
    ("--master-port=0 x.py", "", 1, "--master-port=0: a port is a number from 1 to 65535; write --master-port=29500"),
    ("--master-port=-1 x.py", "", 1, "--master-port=-1: a port is a number from 1 to 65535; write --master-port=29500"),
    ("--shutdown-timeout=soon x.py", "", 2, "--shutdown-timeout=soon: not an integer; write --shutdown-timeout=30"),
    ("--shutdown-timeout=-1 x.py", "", 1, "--shutdown-timeout=-1: must not be negative; write --shutdown-timeout=30"),
    ("--start-method=thread x.py", "", 2, "--start-method=thread: no such choice; write --start-method=spawn|fork|forkserver"),
    ("--start-method=fork_server x.py", "", 2, "--start-method=fork_server: no such choice; write --start-method=forkserver"),
    ("--numa-binding=moon x.py", "", 2, "--numa-binding=moon: no such choice; write --numa-binding=node|socket|exclusive|core-complex"),
    ("--numa-binding=node x.py", "", 1, "--numa-binding=node: there is no accelerator to bind to; leave it out, or write --bind=node"),
    ("--numa-binding=exclusive x.py", "", 1, "--numa-binding=exclusive: there is no accelerator to bind to; leave it out, or write --bind=core"),
    ("--numa-binding= x.py", "", 2, "--numa-binding=: no such choice; write --numa-binding=node|socket|exclusive|core-complex"),
    ("--bind=cores x.py", "", 2, "--bind=cores: no such choice; write --bind=core"),
    ("--bind=gpu x.py", "", 2, "--bind=gpu: no such choice; write --bind=node|socket|core-complex|core|none"),
    ("--bind= x.py", "", 2, "--bind=: no such choice; write --bind=node|socket|core-complex|core|none"),
    ("--bind", "", 2, "--bind needs a value; write --bind=KIND"),
    ("--bind=core --nproc-per-node=4 x.py", "", 1, "--bind=core: convoke can use 3 physical cores for 4 workers; write --nproc-per-node=3, or --bind=node"),
    ("--bind=node --numa-binding=node x.py", "", 1, "--bind and --numa-binding exclude each other; remove one of them"),
    ("--bind=none --numa-binding=node x.py", "", 1, "--bind and --numa-binding exclude each other; remove one of them"),
    ("--orphans=kill x.py", "", 2, "--orphans=kill: no such choice; write --orphans=stop|keep"),
    ("--nnodes=0 x.py", "", 1, "--nnodes=0: there must be at least one node; write --nnodes=1"),
    ("--nnodes=2:1 x.py", "", 1, "--nnodes=2:1: the minimum is above the maximum; write --nnodes=1:2"),
    ("--nnodes=1:2:3 x.py", "", 1, "--nnodes=1:2:3: one number or two, not more; write --nnodes=1:4"),
    ("--nnodes=two x.py", "", 1, "--nnodes=two: neither a number of nodes nor a range; write --nnodes=2, or MIN:MAX such as 1:4"),
    ("--nnodes=-2 x.py", "", 1, "--nnodes=-2: there must be at least one node; write --nnodes=1"),
    ("--nnodes= x.py", "", 1, "--nnodes=: neither a number of nodes nor a range; write --nnodes=2, or MIN:MAX such as 1:4"),
    ("--nproc-per-node=many x.py", "", 1, "--nproc-per-node=many: neither a number nor cpu, gpu, xpu or auto; write --nproc-per-node=2"),
    ("--nproc-per-node=GPU x.py", "", 1, "--nproc-per-node=GPU: neither a number nor cpu, gpu, xpu or auto; write --nproc-per-node=gpu"),
    ("--nproc-per-node=gpu x.py", "", 1, "--nproc-per-node=gpu: no GPU was found (no /dev/nvidia0, no /dev/kfd, or the variables hide all); write --nproc-per-node=cpu, or a number"),
    ("--nproc-per-node=xpu x.py", "", 1, "--nproc-per-node=xpu: no Intel GPU was found (no /dev/dri/renderD128 of Intel); write --nproc-per-node=cpu, or a number"),
    ("--nproc-per-node=0 x.py", "", 1, "--nproc-per-node=0: there must be at least one worker; write --nproc-per-node=1"),
    ("--nproc-per-node=-3 x.py", "", 1, "--nproc-per-node=-3: there must be at least one worker; write --nproc-per-node=1"),
    ("--nproc-per-node=2.0 x.py", "", 1, "--nproc-per-node=2.0: neither a number nor cpu, gpu, xpu or auto; write --nproc-per-node=2"),
    ("--nproc-per-node=1000000 x.py", "", 1, "--nproc-per-node=1000000: too many workers; write --nproc-per-node=65536 or fewer"),
    ("--log-dir=/dev/zero x.py", "", 1, "--log-dir=/dev/zero: not a directory; write --log-dir=DIRECTORY"),
    ("--redirects=4 x.py", "", 1, "--redirects=4: neither 0 (none), 1 (stdout), 2 (stderr) or 3 (both), nor a list of rank:digit with ranks 0 to 9; write --redirects=3, or 0:3,1:2"),
    ("--tee=0:1;1:2 x.py", "", 1, "--tee=0:1;1:2: neither 0 (none), 1 (stdout), 2 (stderr) or 3 (both), nor a list of rank:digit with ranks 0 to 9; write --tee=3, or 0:3,1:2"),
    ("--tee=10:1 x.py", "", 1, "--tee=10:1: neither 0 (none), 1 (stdout), 2 (stderr) or 3 (both), nor a list of rank:digit with ranks 0 to 9; write --tee=3, or 0:3,1:2"),
    ("-rstdout x.py", "", 1, "--redirects=stdout: neither 0 (none), 1 (stdout), 2 (stderr) or 3 (both), nor a list of rank:digit with ranks 0 to 9; write --redirects=3, or 0:3,1:2"),
    ("--local-ranks-filter=a,b x.py", "", 1, "--local-ranks-filter=a,b: not a list of local ranks; write --local-ranks-filter=0,2"),
    ("--local-ranks-filter=0,-1 x.py", "", 1, "--local-ranks-filter=0,-1: not a list of local ranks; write --local-ranks-filter=0,2"),
    ("--rdzv-backend=nope x.py", "", 1, "--rdzv-backend=nope: no such backend; write --rdzv-backend=static|c10d|etcd-v2|etcd"),
    ("--rdzv-backend=C10D x.py", "", 1, "--rdzv-backend=C10D: no such backend; write --rdzv-backend=c10d"),
    ("--rdzv-backend=etcd-v3 x.py", "", 1, "--rdzv-backend=etcd-v3: no such backend; write --rdzv-backend=etcd-v2"),
    ("--rdzv-backend=etcd --rdzv-endpoint=h1:2379,h2:x x.py", "", 1, "--rdzv-endpoint=h1:2379,h2:x: the port must be a number from 0 to 65535; write --rdzv-endpoint=HOST:PORT, such as 10.0.0.1:29500"),
    ("--rdzv-backend=etcd --rdzv-conf=password=x x.py", "", 1, "--rdzv-conf: everybody on this host can read a password on a command line; set CONVOKE_ETCD_PASSWORD or CONVOKE_ETCD_PASSWORD_FILE"),
    ("--rdzv-backend=etcd --rdzv-conf=cacert=ca.pem x.py", "", 1, "--rdzv-conf: certificates are given, but not protocol=https"),
    ("--rdzv-backend=etcd-v2 --rdzv-conf=protocol=https,ssl_cert=c.pem x.py", "", 1, "--rdzv-conf: a client certificate needs its key: ssl_cert and ssl_cert_key"),
    ("--rdzv-backend=c10d --rdzv-conf=join_timeout x.py", "", 1, "--rdzv-conf=join_timeout: join_timeout has no value; write --rdzv-conf=KEY=VALUE,KEY=VALUE"),
    ("--rdzv-backend=c10d --rdzv-conf==1 x.py", "", 1, "--rdzv-conf==1: a setting without a key; write --rdzv-conf=KEY=VALUE,KEY=VALUE"),
    ("--rdzv-backend=c10d --rdzv-conf=a=1,,b=2 x.py", "", 1, "--rdzv-conf=a=1,,b=2: a setting without a key; write --rdzv-conf=KEY=VALUE,KEY=VALUE"),
    ("--rdzv-backend=c10d --rdzv-conf=join_timeout=0 x.py", "", 1, "--rdzv-conf: join_timeout=0 must be a whole number above 0; write join_timeout=60"),
    ("--rdzv-backend=c10d --rdzv-conf=is_host=maybe x.py", "", 1, "--rdzv-conf: is_host=maybe must be true or false; write is_host=true"),
    ("--rdzv-backend=c10d --rdzv-conf=store_type=redis x.py", "", 1, "--rdzv-conf: store_type=redis must be tcp or file; write store_type=tcp"),
    ("--rdzv-backend=c10d --rdzv-conf=store_type=file x.py", "", 1, "--rdzv-endpoint is missing: with store_type=file it is the path of a file that all nodes share; write --rdzv-endpoint=/shared/job"),
    ("--rdzv-backend=c10d --nnodes=2 --rdzv-endpoint=h:0 x.py", "", 1, "--rdzv-endpoint=h:0: port 0 cannot be known to other nodes; write --rdzv-endpoint=HOST:29500, or --standalone for one node"),
    ("--rdzv-backend=c10d --rdzv-conf=restart_budget=all x.py", "", 1, "--rdzv-conf: restart_budget=all must be agent or job; write restart_budget=agent"),
    ("--standalone --rdzv-conf=read_timeout=x x.py", "", 1, "--rdzv-conf: read_timeout=x must be a whole number above 0; write read_timeout=60"),
    ("--nnodes=2 --rdzv-conf=timeout=15m x.py", "", 1, "--rdzv-conf: timeout=15m must be a whole number above 0; write timeout=60"),
    ("--nnodes=2 --rdzv-endpoint=host x.py", "", 1, "--rdzv-endpoint=host: the static backend needs a port; write --rdzv-endpoint=HOST:PORT, such as 10.0.0.1:29500"),
    ("--nnodes=2 --rdzv-endpoint=host:port x.py", "", 1, "--rdzv-endpoint=host:port: the port must be a number from 0 to 65535; write --rdzv-endpoint=HOST:PORT, such as 10.0.0.1:29500"),
    ("--nnodes=2 --rdzv-endpoint=host:70000 x.py", "", 1, "--rdzv-endpoint=host:70000: the port must be a number from 0 to 65535; write --rdzv-endpoint=HOST:PORT, such as 10.0.0.1:29500"),
    ("--nnodes=2 --rdzv-endpoint=ho/st:1 x.py", "", 1, "--rdzv-endpoint=ho/st:1: the host must be a name or an address; write --rdzv-endpoint=HOST:PORT, such as 10.0.0.1:29500"),
    ("--nnodes=2 --rdzv-endpoint=host:0 x.py", "", 1, "--rdzv-endpoint=host:0: port 0 cannot be known to other nodes; write --rdzv-endpoint=HOST:29500, or --standalone for one node"),
    ("--nnodes=2 --rdzv-endpoint=http://host:1 x.py", "", 1, "--rdzv-endpoint=http://host:1: only HOST:PORT, without http://; write --rdzv-endpoint=host:1"),
    ("--rdzv-backend=etcd --rdzv-endpoint=https://h1:2379,https://h2:2379/v2 x.py", "", 1, "--rdzv-endpoint=https://h1:2379,https://h2:2379/v2: only HOST:PORT, without https://; write --rdzv-endpoint=h1:2379,h2:2379, and protocol=https in --rdzv-conf"),
    ("--rdzv-backend=c10d --rdzv-endpoint=tcp://[::1]:7 x.py", "", 1, "--rdzv-endpoint=tcp://[::1]:7: only HOST:PORT, without tcp://; write --rdzv-endpoint=[::1]:7"),
    ("--nnodes=2 --rdzv-endpoint=fe80::1:2950 x.py", "", 1, "--rdzv-endpoint=fe80::1:2950: an IPv6 address stands in brackets; write --rdzv-endpoint=[fe80::1]:2950, or [fe80::1:2950]:29500"),
    ("--rdzv-backend=c10d --rdzv-endpoint=2001:db8::abcd x.py", "", 1, "--rdzv-endpoint=2001:db8::abcd: an IPv6 address stands in brackets; write --rdzv-endpoint=[2001:db8::abcd]:29400"),
    ("--rdzv-backend=c10d --rdzv-endpoint=a:b:29400 x.py", "", 1, "--rdzv-endpoint=a:b:29400: the host must be a name or an address; write --rdzv-endpoint=HOST:PORT, such as 10.0.0.1:29500"),
    ("--nnodes=2 --master-addr=10.0.0.1:29500 x.py", "", 1, "--master-addr=10.0.0.1:29500: a port does not belong here; write --master-addr=10.0.0.1 --master-port=29500"),
    ("--nnodes=2 --master-addr=[::1]:29500 x.py", "", 1, "--master-addr=[::1]:29500: a port does not belong here; write --master-addr=::1 --master-port=29500"),
    ("--nnodes=2 x.py", "PET_MASTER_ADDR=node0:1234", 1, "PET_MASTER_ADDR=node0:1234: a port does not belong here; write PET_MASTER_ADDR=node0 PET_MASTER_PORT=1234"),
    ("--nnodes=2 --master-addr=tcp://node0:1234 x.py", "", 1, "--master-addr=tcp://node0:1234: a host, without tcp://; write --master-addr=node0"),
    ("--nnodes=2 --master-addr= x.py", "", 1, "--master-addr=: neither a host name nor an address; write --master-addr=10.0.0.1"),
    ("--nnodes=2 --local-addr=10.0.0.1:29500 x.py", "", 1, "--local-addr=10.0.0.1:29500: a port does not belong here; write --local-addr=10.0.0.1"),
    ("–nproc-per-node=2 x.py", "", 2, "`–nproc-per-node=2` has a character that a word processor or a web page has put for a plain one (U+2013); write --nproc-per-node=2, or ./–nproc-per-node=2 if it is a file"),
    ("—standalone x.py", "", 2, "`—standalone` has a character that a word processor or a web page has put for a plain one (U+2014); write --standalone, or ./—standalone if it is a file"),
    ("−m pkg", "", 2, "`−m` has a character that a word processor or a web page has put for a plain one (U+2212); write -m, or ./−m if it is a file"),
    ("–t3 x.py", "", 2, "`–t3` has a character that a word processor or a web page has put for a plain one (U+2013); write -t3, or ./–t3 if it is a file"),
    ("--nproc‑per‑node=2 x.py", "", 2, "`--nproc‑per‑node=2` has a character that a word processor or a web page has put for a plain one (U+2011); write --nproc-per-node=2, or ./--nproc‑per‑node=2 if it is a file"),
    ("-–nnodes=2 x.py", "", 2, "`-–nnodes=2` has a character that a word processor or a web page has put for a plain one (U+2013); write --nnodes=2, or ./-–nnodes=2 if it is a file"),
    ("\u{200b}--nnodes=2 x.py", "", 2, "`\u{200b}--nnodes=2` has a character that a word processor or a web page has put for a plain one (U+200B); write --nnodes=2, or ./\u{200b}--nnodes=2 if it is a file"),
    ("--rdzv-id –standalone x.py", "", 2, "--rdzv-id needs a value, but `–standalone` looks like a flag; write --rdzv-id=–standalone if it is meant as the value"),
    ("--nnodes=2 --node-rank=2 x.py", "", 1, "--node-rank=2: with 2 nodes there are node ranks 0 to 1 only; write --node-rank=1, or raise --nnodes"),
    ("--nnodes=2 --node-rank=-1 x.py", "", 1, "--node-rank=-1: with 2 nodes there are node ranks 0 to 1 only; write --node-rank=1, or raise --nnodes"),
    ("--nnodes=2 --master-addr= x.py", "", 1, "--master-addr=: neither a host name nor an address; write --master-addr=10.0.0.1"),
    ("--nnodes=2 --master-addr=a/b x.py", "", 1, "--master-addr=a/b: neither a host name nor an address; write --master-addr=10.0.0.1"),
    ("--standalone --nnodes=2 x.py", "", 1, "--standalone is one node, but --nnodes asks for 2; remove --standalone and name an --rdzv-endpoint, or remove --nnodes"),
    ("-m --no-python x.py", "", 1, "--module and --no-python exclude each other; remove one of them"),
    ("--pass-local-rank=x x.py", "", 2, "--pass-local-rank=x: no such form; write --pass-local-rank=dash|underscore|both"),
    ("--pass-local-rank --no-python x.py", "", 1, "--no-python with --pass-local-rank: the program would get an argument that only scripts expect; add --use-env"),
    ("--use-env=perhaps x.py", "", 2, "--use-env=perhaps: neither true nor false; write --use-env=True"),
    ("--event-log-handler=nope x.py", "", 1, "--event-log-handler=nope: no such handler; write --event-log-handler=console"),
    ("--logs-specs=mine x.py", "", 1, "--logs-specs=mine: there are no Python plug-ins here; leave it out, and see --redirects, --tee and --log-dir"),
    ("--print-completion=cmd", "", 2, "--print-completion=cmd: no such shell; write bash, zsh, fish, elvish or powershell"),
    ("--print-completion", "", 2, "--print-completion needs a value; write --print-completion=SHELL"),
    ("x.py", "PET_NNODES=0", 1, "PET_NNODES=0: there must be at least one node; write PET_NNODES=1"),
    ("x.py", "PET_MAX_RESTARTS=x", 2, "PET_MAX_RESTARTS=x: not an integer; write PET_MAX_RESTARTS=3"),
    ("x.py", "PET_NO_PYTHON=yes", 1, "PET_NO_PYTHON=yes: a switch is an integer; write PET_NO_PYTHON=1 or PET_NO_PYTHON=0"),
    ("x.py", "PET_STANDALONE=", 1, "PET_STANDALONE=: a switch is an integer; write PET_STANDALONE=1 or PET_STANDALONE=0"),
    ("x.py", "PET_MASTER_PORT=", 2, "PET_MASTER_PORT=: not an integer; write PET_MASTER_PORT=29500"),
    ("x.py", "PET_RDZV_BACKEND=zeus", 1, "PET_RDZV_BACKEND=zeus: no such backend; write PET_RDZV_BACKEND=static|c10d|etcd-v2|etcd"),
    ("x.py", "PET_TEE=9", 1, "PET_TEE=9: neither 0 (none), 1 (stdout), 2 (stderr) or 3 (both), nor a list of rank:digit with ranks 0 to 9; write PET_TEE=3, or 0:3,1:2"),
    ("x.py", "PET_RDZV_CONF=a", 1, "PET_RDZV_CONF=a: a has no value; write PET_RDZV_CONF=KEY=VALUE,KEY=VALUE"),
    ("x.py", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=x", 1, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=x: must be a whole number of seconds, 0 or more; write TORCH_ELASTIC_SHUTDOWN_TIMEOUT=30"),
    ("--nproc-per-node=2 --virtual-local-rank x.py", "CUDA_VISIBLE_DEVICES=5", 1, "--virtual-local-rank: CUDA_VISIBLE_DEVICES=5 has no device for local rank 1 (entries: 1); lower --nproc-per-node or extend the list"),
    ("-nnodes=2 x.py", "", 2, "unknown flag -nnodes; write --nnodes"),
    ("--Nnodes=2 x.py", "", 2, "unknown flag --Nnodes; write --nnodes"),
    ("--master-adress=h x.py", "", 2, "unknown flag --master-adress; did you mean --master-addr?"),
    ("--rdzv-endpiont=h:1 x.py", "", 2, "unknown flag --rdzv-endpiont; did you mean --rdzv-endpoint?"),
    ("--tee", "", 2, "--tee needs a value; write --tee=STREAMS"),
    ("--=x x.py", "", 2, "unknown flag --; see --help (flags of the script go behind SCRIPT)"),
    ("-rV", "", 2, "no SCRIPT; write convoke [FLAGS] SCRIPT [ARGUMENTS]"),
    ("-mr x.py", "", 2, "no SCRIPT: `x.py` was taken as the value of --redirects; write --redirects=VALUE x.py"),
    ("--nnodes=2000000 x.py", "", 1, "--nnodes=2000000: too many nodes; write --nnodes=1000000 or fewer"),
    ("--rdzv-backend=c10d --rdzv-conf=cas_backoff_max_seconds=inf x.py", "", 1, "--rdzv-conf: cas_backoff_max_seconds=inf must be a number of seconds, 0 or more; write cas_backoff_max_seconds=0.5"),
    ("--rdzv-backend=etcd --rdzv-conf=protocol=ftp x.py", "", 1, "--rdzv-conf: protocol=ftp must be http or https; write protocol=http"),
    ("x.py", "PET_NPROC_PER_NODE=two", 1, "PET_NPROC_PER_NODE=two: neither a number nor cpu, gpu, xpu or auto; write PET_NPROC_PER_NODE=2"),
    ("x.py", "PET_SHUTDOWN_TIMEOUT=1.5", 2, "PET_SHUTDOWN_TIMEOUT=1.5: not an integer; write PET_SHUTDOWN_TIMEOUT=30"),
    ("x.py", "PET_MONITOR_INTERVAL=often", 2, "PET_MONITOR_INTERVAL=often: not a number; write PET_MONITOR_INTERVAL=0.1"),
    ("x.py", "PET_LOCAL_RANKS_FILTER=1;2", 1, "PET_LOCAL_RANKS_FILTER=1;2: not a list of local ranks; write PET_LOCAL_RANKS_FILTER=0,2"),
    ("x.py", "PET_EVENT_LOG_HANDLER=syslog", 1, "PET_EVENT_LOG_HANDLER=syslog: no such handler; write PET_EVENT_LOG_HANDLER=console"),
    ("x.py", "PET_RUN_PATH=on", 1, "PET_RUN_PATH=on: a switch is an integer; write PET_RUN_PATH=1 or PET_RUN_PATH=0"),
    ("x.py", "PET_START_METHOD=thread", 2, "PET_START_METHOD=thread: no such choice; write PET_START_METHOD=spawn|fork|forkserver"),
    ("x.py", "PET_NODE_RANK=", 2, "PET_NODE_RANK=: not an integer; write PET_NODE_RANK=0"),
];

#[test]
fn each_malformed_command_line_is_refused_with_advice() {
    for (line, variable, code, message) in MALFORMED {
        let variables: Vec<(&str, &str)> = variable.split_once('=').into_iter().collect();
        let error = config_of_line(line, &variables, &here()).expect_err(line);
        assert_eq!(error.text, format!("convoke: error: {message}\n"), "{line} [{variable}]");
        assert_eq!(error.code, *code, "{line} [{variable}]");
    }
}

#[test]
fn flag_overrides_a_malformed_environment_variable() {
    for (line, variable) in [
        ("--max-restarts=1 x.py", "PET_MAX_RESTARTS=x"),
        ("--nnodes=1 x.py", "PET_NNODES=0"),
        ("--tee=0 x.py", "PET_TEE=9"),
        ("--shutdown-timeout=1 x.py", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=x"),
    ] {
        let variables: Vec<(&str, &str)> = variable.split_once('=').into_iter().collect();
        config_of_line(line, &variables, &here()).expect(line);
    }
}

#[cfg(not(feature = "etcd"))]
#[test]
fn launcher_without_etcd_refuses_etcd_backends_with_advice() {
    let advice = "this convoke was built without etcd; install protoc (Debian: apt-get install protobuf-compiler \
        libprotobuf-dev) and rebuild (cargo build --release -p convoke), or use --rdzv-backend=c10d, with an endpoint or \
        a shared file (docs/reference/rendezvous.md)";
    for (line, variables, given) in [
        ("--rdzv-backend=etcd --rdzv-endpoint=h:2379 x.py", &[][..], "--rdzv-backend=etcd"),
        ("--nnodes=1:2 --rdzv-backend etcd-v2 --rdzv-endpoint=h x.py", &[], "--rdzv-backend=etcd-v2"),
        ("--rdzv-endpoint=h x.py", &[("PET_RDZV_BACKEND", "etcd")], "PET_RDZV_BACKEND=etcd"),
        ("--dry-run --rdzv-backend=etcd --rdzv-endpoint=h x.py", &[], "--rdzv-backend=etcd"),
    ] {
        let error = config_of_line(line, variables, &here()).expect_err(line);
        assert_eq!((error.text, error.code), (format!("convoke: error: {given}: {advice}\n"), 1), "{line}");
    }
    config_of_line("--standalone --rdzv-backend=etcd x.py", &[], &here()).expect("the backend is ignored");
}

#[test]
fn empty_script_is_refused() {
    use std::ffi::OsStr;
    for words in [&[""][..], &["--nnodes=1", ""], &["--", ""], &["-m", ""], &["--no-python", "  "]] {
        let words: Vec<&OsStr> = words.iter().map(OsStr::new).collect();
        let error = super::config_of_words(&words, &[], &here()).expect_err("empty");
        let wanted = "convoke: error: SCRIPT is an empty word; is a variable of the shell not set, as in convoke \"$SCRIPT\"?\n";
        assert_eq!((error.text.as_str(), error.code), (wanted, 2), "{words:?}");
    }
}

#[test]
fn typographic_characters_are_kept_in_values_and_script_arguments() {
    let config = super::config("--rdzv-id=a–b --master-port=1 x.py –nnodes=3");
    assert_eq!((config.run_id.as_str(), config.nodes.max), ("a–b", 1));
}
