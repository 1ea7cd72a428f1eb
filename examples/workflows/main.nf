params.gpujobs = ''   // --gpujobs '--site delta --set gpus=8'

process mean {
    executor 'local'

    output:
    path 'mean.json'

    script:
    """
    gpujobs submit $projectDir/profile.yaml $params.gpujobs --wait --json \\
        --set 'run=[python, "$projectDir/step.py", --output, mean.json]' > cluster.json
    """
}

workflow {
    mean()
}
