//! The launcher with fault injection: it fails at the points that a test orders.

fn main() -> std::process::ExitCode {
    convoke_launcher::main()
}
